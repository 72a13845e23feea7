"""Run the programs: on this machine, in a demo, under supervisord. Knows both programs, and holds the deployment's
files."""
