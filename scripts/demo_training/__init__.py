"""Parts of `scripts/train_demo_model.py`: configuration, tokenizer, batches, network, accuracy."""
