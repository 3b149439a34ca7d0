from tests.acceptance.torchvision_operators import declare

declare()
