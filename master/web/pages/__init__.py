"""The web page of a master: what is going on, what is stuck and why, and buttons to act. Any master serves it, leader
or standby.

``site`` puts it together (templates, files, headers, errors), ``views`` shows, ``actions`` does, ``text`` says how
things are written, ``port`` is what it asks of the master. Pages are made on the server and work without scripts;
``static/usher.js`` keeps them up to date.

What producers, consumers and handlers have written is shown literally: Jinja escapes it, control characters are made
visible (``text.visible``), and the Content-Security-Policy runs nothing but our own file. Buttons are for operators;
the server checks the role (``usher.common.http.auth``) whatever a browser sends.
"""

from __future__ import annotations
