"""The attack suite: scripted attacks on a sandbox provider and its integrity policy, through whole trials."""
