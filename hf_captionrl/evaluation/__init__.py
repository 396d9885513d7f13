"""Files of captions, and their evaluation with scorers, references and checkers."""
