"""What other frameworks call rlsp by: each module speaks one framework's public protocol and imports none."""
