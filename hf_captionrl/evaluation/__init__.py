"""Files of captions, and what a scorer, references and checkers say of them."""
