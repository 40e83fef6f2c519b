"""Image, Helm chart, dashboards and alerts; the modules here write and read those files."""
