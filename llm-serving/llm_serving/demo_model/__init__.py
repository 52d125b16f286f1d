"""The demo model: a small Llama that answers questions with one correct answer each, as a Hugging Face model folder.

`scripts/train_demo_model.py` wrote it. `questions.json` has questions that were not used in training, with their
answers; `scripts/demo_training/tasks.py` generates more.
"""
