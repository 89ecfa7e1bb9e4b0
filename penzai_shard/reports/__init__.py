"""What people read: one ``Report`` of rows for every room, and the views of it."""
