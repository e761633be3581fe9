"""Engines that run models; nothing above this room imports one."""
