"""Parts of `scripts/train_demo_model.py`: questions, configuration, tokenizer, batches, network, accuracy."""
