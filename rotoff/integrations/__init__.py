"""One line for where people train: callbacks for Hugging Face's Trainer and for Lightning, a module each."""
