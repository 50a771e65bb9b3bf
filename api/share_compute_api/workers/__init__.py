"""Code that runs in separate processes: planning, export, chat templates and tokenizers."""
