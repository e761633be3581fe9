"""The one mechanism for capture, on flat rows; nothing here knows which engine runs."""
