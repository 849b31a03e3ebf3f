"""The classes of all versions by their modules' names; who imports from here asks for one of them."""
