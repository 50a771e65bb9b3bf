"""Code that runs in processes of its own: planning, export, templates and tokenizers."""
