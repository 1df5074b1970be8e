"""Where members lie: a folder, a repository on the Hub, or archives; read by ranges, cached, copied, without torch."""
