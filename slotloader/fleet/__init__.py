"""Starting, watching, restarting and ending workers."""
