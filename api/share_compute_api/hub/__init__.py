"""Model cards, and models of the Hugging Face Hub."""
