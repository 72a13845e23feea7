"""The web page of a master: what is going on, what is stuck and why, and buttons to act. Any master serves it, leader
or standby. Pages are made on the server and work without scripts; ``static/usher.js`` keeps them up to date.

Texts of producers, consumers and handlers are shown literally: Jinja escapes them, control characters are made visible
(``formatting.visible``), and the Content-Security-Policy runs nothing but our own file. Buttons are for operators; the
server checks the role (``usher.common.http.auth``) whatever a browser sends.
"""

from __future__ import annotations
