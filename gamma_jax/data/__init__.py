"""Text to batches: tokenizer, prepared corpora, the input pipeline."""
