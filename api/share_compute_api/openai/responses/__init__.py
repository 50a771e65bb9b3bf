"""The part of the Responses API for text and function tools; it is translated into chats."""
