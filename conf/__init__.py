"""Values of every option; the types and rules that they obey are in rlsp.config."""
