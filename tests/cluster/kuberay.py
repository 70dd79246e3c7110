"""The fields of KubeRay's RayJob and RayService that the manifests use, by their Go types' names.

Written from the operator's type definitions (ray.io/v1); what is not listed is refused, so a field
that is misspelt or put in the wrong place fails a test instead of being dropped by a cluster.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Quantity = str


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", max_length=47)


class EnvVar(Strict):
    name: str
    value: str


class Port(Strict):
    name: str = Field(max_length=15)
    containerPort: int


class VolumeMount(Strict):
    name: str
    mountPath: str
    readOnly: bool = False


class Resources(Strict):
    requests: dict[str, Quantity]
    limits: dict[str, Quantity]


class Capabilities(Strict):
    add: list[str]


class SecurityContext(Strict):
    capabilities: Capabilities


class Container(Strict):
    name: str
    image: str
    env: list[EnvVar] = []
    ports: list[Port] = []
    resources: Resources
    securityContext: SecurityContext | None = None
    volumeMounts: list[VolumeMount] = []


class HostPath(Strict):
    path: str
    type: Literal["Directory", "DirectoryOrCreate"]


class Secret(Strict):
    secretName: str


class EmptyDir(Strict):
    medium: Literal["Memory"]
    sizeLimit: Quantity


class Claim(Strict):
    claimName: str


class Volume(Strict):
    name: str
    hostPath: HostPath | None = None
    secret: Secret | None = None
    emptyDir: EmptyDir | None = None
    persistentVolumeClaim: Claim | None = None


class Toleration(Strict):
    key: str
    operator: Literal["Exists", "Equal"]
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]


class PodSpec(Strict):
    containers: list[Container]
    volumes: list[Volume] = []
    nodeSelector: dict[str, str] = {}
    tolerations: list[Toleration] = []
    terminationGracePeriodSeconds: int = 30


class PodTemplate(Strict):
    spec: PodSpec


class AuthOptions(Strict):
    mode: Literal["token", "disabled"]
    secretName: str


class HeadGroup(Strict):
    rayStartParams: dict[str, str]
    template: PodTemplate


class WorkerGroup(HeadGroup):
    groupName: str
    replicas: int
    minReplicas: int
    maxReplicas: int


class ClusterSpec(Strict):
    rayVersion: str
    authOptions: AuthOptions
    headGroupSpec: HeadGroup
    workerGroupSpecs: list[WorkerGroup]


class UpgradeStrategy(Strict):
    type: Literal["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]


class RayServiceSpec(Strict):
    upgradeStrategy: UpgradeStrategy
    excludeHeadPodFromServeSvc: bool
    serveConfigV2: str
    rayClusterConfig: ClusterSpec


class RayService(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayService"]
    metadata: Metadata
    spec: RayServiceSpec

    @property
    def cluster(self) -> ClusterSpec:
        return self.spec.rayClusterConfig


class RayJobSpec(Strict):
    entrypoint: str
    submissionMode: Literal["K8sJobMode", "HTTPMode", "SidecarMode", "InteractiveMode"]
    shutdownAfterJobFinishes: bool
    ttlSecondsAfterFinished: int
    backoffLimit: int
    activeDeadlineSeconds: int
    rayClusterSpec: ClusterSpec


class RayJob(Strict):
    apiVersion: Literal["ray.io/v1"]
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: RayJobSpec

    @property
    def cluster(self) -> ClusterSpec:
        return self.spec.rayClusterSpec


Manifest = RayJob | RayService
KINDS: dict[str, Any] = {"RayJob": RayJob, "RayService": RayService}
