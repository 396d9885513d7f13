"""Text models: instructions, questions, answers, judges."""
