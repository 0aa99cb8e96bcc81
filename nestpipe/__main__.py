from nestpipe.cli import main

main()
