"""Run migrations on the connection that `share_compute.store.database.database` opened."""

from alembic import context

from share_compute.store.database.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    compare_type=True,
    transaction_per_migration=False,
)
context.run_migrations()
