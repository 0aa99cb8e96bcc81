"""`nestpipe doctor`: before a long run, does every worker have the same code, config and data, enough memory and disk, one shared
folder, and good links to the others?

`facts` is what one worker sees, `checks` what follows from everybody's facts, `links` measures every pair, `examine` lets the
workers meet, `command` is the command line. Workers talk through the store of the launcher before they open any
connection to each other, so that what keeps them from it can still be said. Nothing waits without a limit.
"""
