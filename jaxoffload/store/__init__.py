"""What is kept between processes: a folder of checked entries, and what tells them apart."""
