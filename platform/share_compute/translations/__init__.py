"""Translations of texts that are written in English: errors, hints, reasons, events and alerts."""
