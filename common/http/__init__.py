"""HTTP for all programs: serving, authentication, problem documents, OpenAPI."""
