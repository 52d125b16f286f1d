"""The demo model: a small Llama that answers questions with one correct answer each.

The folder is a complete Hugging Face model folder (configuration, weights, tokenizer, chat template), written by
`scripts/train_demo_model.py`. `questions.json` has questions that were not used in training, with their answers;
`scripts/demo_training/tasks.py` generates more.
"""
