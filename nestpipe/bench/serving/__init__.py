"""`nestpipe bench serving` and `nestpipe load`: a server under load, on this machine."""
