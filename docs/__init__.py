"""What the pages are made with: pictures, tables, and the site."""
