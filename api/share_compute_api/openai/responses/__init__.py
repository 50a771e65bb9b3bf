"""The part of the Responses API for text and function tools; requests are translated into chats."""
