"""Pictures of a call and of how kernels walk it. They need matplotlib, which is loaded by the first one."""
