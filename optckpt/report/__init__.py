"""What a person sees: tables, figures, progress."""
