"""Lead: lease, epoch, and the scripts that carry it. Everything that leads stands on this room."""
