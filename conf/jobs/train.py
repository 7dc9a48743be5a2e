"""The command `dbx-tf` as a file, for a spark_python_task; its parameters are the command's."""

from dbx_tf.cli import main

main()
