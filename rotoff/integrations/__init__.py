"""Callbacks for Hugging Face's Trainer and for Lightning, one module each."""
