"""How results look: units, pictures and pages that the commands share. Computes nothing and knows no command."""
