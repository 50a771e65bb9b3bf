"""Tools of chat requests: their definitions, the syntax of calls in a model's text, and grammars of this syntax."""
