"""Downstream tasks: multiple choice by likelihood, problems by generation."""
