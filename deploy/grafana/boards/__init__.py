"""All dashboards."""

from deploy.grafana.boards.bubbles import BUBBLES
from deploy.grafana.boards.instances import INSTANCE_BOARD
from deploy.grafana.boards.overview import OVERVIEW
from deploy.grafana.boards.services import SERVICES
from deploy.grafana.boards.speculation import SPECULATION

BOARDS = (OVERVIEW, SERVICES, INSTANCE_BOARD, SPECULATION, BUBBLES)
