"""Wire forms: each turns a request into sequences and their outcomes into a reply."""
