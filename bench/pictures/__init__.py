"""Pictures from records: each a program that draws one."""
