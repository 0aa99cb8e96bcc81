"""`nestpipe bench sequences`: models of long histories."""
