"""Translations of English texts for users: errors, hints, reasons, events and alerts."""
