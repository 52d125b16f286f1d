"""The demo model: a small Llama for questions with one right answer each.

The folder is a complete Hugging Face model folder (configuration, weights, tokenizer, chat template), written by
`scripts/train_demo_model.py`. `questions.json` holds questions that training never saw, with their answers;
`scripts/demo_training/tasks.py` generates more.
"""
