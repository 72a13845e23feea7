"""Run everything on this machine: `usher up`, `usher demo`, `usher init-deploy`."""

from __future__ import annotations
