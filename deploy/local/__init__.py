"""Run everything on this machine: `usher up`, `usher demo`, `usher init-deploy`."""
