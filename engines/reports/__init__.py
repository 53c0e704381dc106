"""What people see of runs, profiles and simulations: tables, pictures, pages."""
