"""The web page of a master, made on the server: it works without scripts, and ``static/usher.js`` keeps it up to date.
Texts of producers, consumers and handlers are shown literally: Jinja escapes them, ``formatting.visible`` shows control
characters, and the Content-Security-Policy runs nothing but our own file."""
