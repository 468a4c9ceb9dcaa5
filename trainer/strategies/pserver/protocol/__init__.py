"""What workers and servers share: messages, how values travel, who keeps what, files of a snapshot."""
